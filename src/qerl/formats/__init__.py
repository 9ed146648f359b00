"""What the bits mean, and the files that hold them. Imports nothing else of the package."""
