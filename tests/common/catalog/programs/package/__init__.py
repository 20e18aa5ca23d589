"""Package of a user."""

from .mine import build as build
