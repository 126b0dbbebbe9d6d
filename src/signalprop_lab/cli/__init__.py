"""The commands of the laboratory; `signalprop` finds them by their entry points."""
