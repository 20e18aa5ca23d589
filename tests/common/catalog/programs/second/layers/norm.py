"""Module in a folder without __init__.py."""

NAME = "second, in a folder"
