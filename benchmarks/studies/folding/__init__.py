"""What folding alike hosts costs in truth."""
