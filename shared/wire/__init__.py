"""The protocol between the parent and a child: frames on two private pipes."""
