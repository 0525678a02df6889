"""Natural steps batch by batch, with what every batch has said so far kept in natural parameters."""
