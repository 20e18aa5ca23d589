"""Helper of the user's files in this folder."""

NAME = "first"
