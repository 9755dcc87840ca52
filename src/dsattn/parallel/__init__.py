"""What is put on a model from outside: how it is cut up, and what of it runs again."""
