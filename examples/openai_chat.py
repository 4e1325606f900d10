"""OpenAI's sample with two changes: the address, and the key that `sordino gateway` made at its first start.

    sordino gateway --server grpcs://host:port --ca ca.pem --token-file token
    python examples/openai_chat.py "What can I cook with leeks?"

It needs `openai` and `platformdirs`. OPENAI_BASE_URL and OPENAI_API_KEY say where another gateway is, and its key.
"""

import os
import sys

from openai import OpenAI
from platformdirs import user_data_path

prompt = sys.argv[1] if len(sys.argv) > 1 else "Say this is a test."
client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY") or (user_data_path("sordino") / "gateway" / "key").read_text().strip(),
)
model = client.models.list().data[0].id  # or the --name that the gateway was started with

answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}], max_tokens=64)
print("whole:   ", answer.choices[0].message.content)
print("tokens:  ", answer.usage.completion_tokens)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": prompt}],
    max_tokens=64,
    stream=True,
)
print("streamed: ", end="")
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
