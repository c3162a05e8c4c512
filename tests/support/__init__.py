"""What several tests need: servers and stores that misbehave to order."""
