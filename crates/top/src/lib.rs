//! `qd top`: the deck in a terminal. It draws the view models of `qd-views` and sends what the user decides to the
//! daemon through the HTTP API; it has no rule of its own.
