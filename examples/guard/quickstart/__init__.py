"""The app: a small network on handwritten digits, trained by DP-SGD (Opacus) at each client."""
