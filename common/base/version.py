"""Version of allstep, for setup.cfg and for programs."""

VERSION = "0.2.0"
