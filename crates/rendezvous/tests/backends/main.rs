//! Every backend passes the same suite; each has tests of its own besides.

mod agent;
mod etcd;
mod hostile;
mod server;
mod suite;
