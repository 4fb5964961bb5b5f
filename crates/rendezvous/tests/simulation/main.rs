//! Runs on a network that loses, delays, repeats and reorders, with machines that crash and come back, in
//! virtual time and from a seed: what a seed does it does again.

mod chaos;
mod etcd;
mod judge;
mod server;

/// How many seeds; `TRAINYARD_SEEDS` for more.
fn num_seeds(usual: u64) -> u64 {
    match std::env::var("TRAINYARD_SEEDS") {
        Ok(text) => text.parse().expect("TRAINYARD_SEEDS is a number"),
        Err(_) => usual,
    }
}

#[test]
fn split_brain_never_over_a_server_whatever_the_network_does() {
    let mut totals = judge::Totals::default();
    for seed in 0..num_seeds(3000) {
        totals.add(server::simulate(seed));
    }
    eprintln!("over a server: {totals}");
}

#[test]
fn split_brain_never_over_etcd_whatever_the_network_does() {
    let mut totals = judge::Totals::default();
    for seed in 0..num_seeds(1000) {
        totals.add(etcd::simulate(seed));
    }
    eprintln!("over etcd: {totals}");
}
