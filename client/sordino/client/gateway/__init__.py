"""``sordino gateway``: an OpenAI-compatible endpoint on the user's own machine."""
