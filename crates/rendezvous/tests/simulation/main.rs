//! Runs on a network that loses, delays, repeats and reorders, with machines that crash and come back, in
//! virtual time and from a seed: what a seed does it does again.

mod chaos;
mod etcd;
mod judge;
mod server;

/// The usual seeds; as many as `TRAINYARD_SEEDS` says, or only `TRAINYARD_SEED`.
fn seeds(usual: u64) -> std::ops::Range<u64> {
    let number = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(text.parse::<u64>().expect("a number of seeds"))
    };
    match number("TRAINYARD_SEED") {
        Some(one) => one..one + 1,
        None => 0..number("TRAINYARD_SEEDS").unwrap_or(usual),
    }
}

#[test]
fn split_brain_never_over_a_server_whatever_the_network_does() {
    let mut totals = judge::Totals::default();
    for seed in seeds(3000) {
        totals.add(server::simulate(seed));
    }
    eprintln!("over a server: {totals}");
}

#[test]
fn split_brain_never_over_etcd_whatever_the_network_does() {
    let mut totals = judge::Totals::default();
    for seed in seeds(2000) {
        totals.add(etcd::simulate(seed));
    }
    eprintln!("over etcd: {totals}");
}
