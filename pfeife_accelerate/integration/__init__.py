"""The edge to Accelerate: every attribute we replace is a row of `seams.SEAMS`, every hook a function here."""
