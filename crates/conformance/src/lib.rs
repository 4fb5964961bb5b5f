//! Every strategy against one rank. Tests only.
