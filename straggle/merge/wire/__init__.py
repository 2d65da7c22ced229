"""What passes between ranks: process groups, the store, who is waited for."""
