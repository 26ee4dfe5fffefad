"""Recipes and the training loop; family names never appear here."""
