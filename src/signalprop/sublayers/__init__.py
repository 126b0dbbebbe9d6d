"""One folder for every kind of sublayer; `signalprop.kinds` finds them."""
