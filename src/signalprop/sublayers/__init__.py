"""One folder for every kind of sublayer; `signalprop.network.kinds` finds them."""
