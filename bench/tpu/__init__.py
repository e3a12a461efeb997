"""Programs compiled for TPUs that need not exist, and what their machine code takes."""
