"""What the benches share: processes as the kernel counts them, requests by hand, medians."""
