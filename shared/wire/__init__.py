"""The protocol between the parent and a child: frames on a private stream socket."""
