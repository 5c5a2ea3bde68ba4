"""A backend of dsv41 for the Toy A1."""
