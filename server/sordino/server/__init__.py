"""The provider's side: splits models, hosts their matrices."""

import sordino.shared.grpc_settings  # noqa: F401 - before grpc is imported
