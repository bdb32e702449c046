"""What a judge's noise and bias cost, beside rewards that the task sets by hand."""
