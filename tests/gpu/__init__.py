"""Does Baton work on a GPU, and how fast? One kit, for whoever has one for ten minutes."""
