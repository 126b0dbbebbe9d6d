"""`python -m signalprop`: the command line."""

from signalprop.cli import main

main()
