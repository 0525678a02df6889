"""Which coordinates interact in log p, and Hessians from as few products as that allows."""
