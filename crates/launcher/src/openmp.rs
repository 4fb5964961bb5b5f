//! How the OpenMP threads of started programs wait for each other.
//!
//! A thread of libgomp spins for milliseconds before it sleeps. That is right if every thread has a core. If another
//! program uses the cores too, it keeps the thread for which it waits from running: two programs of two threads each
//! trained at a sixteenth of their speed on two cores. With a short spin they share the cores, and a program alone is as
//! fast as before.

/// The bound that libgomp itself chooses if it has started more threads than there are cores.
const NUM_SPINS: (&str, &str) = ("GOMP_SPINCOUNT", "1000");

/// The variable that bounds the spinning, unless the user has chosen how threads wait.
pub fn environment(is_set: impl Fn(&str) -> bool) -> Option<(&'static str, &'static str)> {
    let chosen = [NUM_SPINS.0, "OMP_WAIT_POLICY"].into_iter().any(is_set);
    (!chosen).then_some(NUM_SPINS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_choice_stays() {
        assert_eq!(environment(|_| false), Some(NUM_SPINS));
        assert_eq!(environment(|name| name == "OMP_WAIT_POLICY"), None);
        assert_eq!(environment(|name| name == "GOMP_SPINCOUNT"), None);
    }
}
