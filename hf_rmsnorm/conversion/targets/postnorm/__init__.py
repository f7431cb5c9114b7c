"""Post-norm models (BERT, BART): taken apart by running them, two neurons more in every FFN, or least squares."""
