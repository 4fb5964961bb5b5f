//! Both backends on real sockets: every backend passes the same suite, and each has tests of its own.

mod agent;
mod etcd;
mod hostile;
mod record;
mod server;
mod suite;
