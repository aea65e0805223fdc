"""Pure arithmetic: counts become blocks, and blocks become the order in which a lane reads them."""
