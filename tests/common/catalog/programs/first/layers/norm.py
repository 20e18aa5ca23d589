"""Module in a folder without __init__.py."""

NAME = "first, in a folder"
