//! Runs in virtual time on a network that loses, delays, duplicates and reorders messages, with nodes that crash and
//! come back. A seed determines everything, so every failure can be repeated.

mod etcd;
mod faults;
mod invariants;
mod server;

/// The seeds to run: `TRAINYARD_SEED` alone, or the first `TRAINYARD_SEEDS`, or the first `default`.
fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(
            text.parse::<u64>()
                .expect("TRAINYARD_SEED and TRAINYARD_SEEDS are numbers"),
        )
    };
    match number("TRAINYARD_SEED") {
        Some(one) => one..one + 1,
        None => 0..number("TRAINYARD_SEEDS").unwrap_or(default),
    }
}

#[test]
fn split_brain_never_happens_over_a_server_under_random_faults() {
    let mut totals = invariants::Totals::default();
    for seed in seeds(3000) {
        totals.add(server::simulate(seed));
    }
    eprintln!("over a server: {totals}");
}

#[test]
fn split_brain_never_happens_over_etcd_under_random_faults() {
    let mut totals = invariants::Totals::default();
    for seed in seeds(2000) {
        totals.add(etcd::simulate(seed));
    }
    eprintln!("over etcd: {totals}");
}
