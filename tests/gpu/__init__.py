"""One kit that checks and measures Baton on a GPU in ten minutes."""
