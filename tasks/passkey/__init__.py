"""The passkey task: a number hidden in a long text and asked for at its end."""
