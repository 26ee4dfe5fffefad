"""What drafts: trained heads, n-grams, and those without training; each file by itself."""
