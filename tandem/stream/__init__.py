"""5 DATA PLANE: episodes on their way from rollout to trainer, and the journal that keeps them."""
