"""All-reduce on bad wires: this backend beside gloo in networks of the laboratory."""
