"""What looks at the engines of a rank: timeline, stall inspector, metrics."""
