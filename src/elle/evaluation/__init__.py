"""How accurate and how linear a trained network is, under which attack."""
