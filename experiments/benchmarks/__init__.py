"""Speed, memory and learning, measured; figures are in results/."""
