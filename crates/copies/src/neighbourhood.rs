//! Whose holder is where, and who keeps copies for whom.

/// The holders of a run, in the order of hosts, and which one is this host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbourhood {
    holders: Vec<String>,
    own: usize,
}

/// Why a list of holders makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NeighbourhoodError {
    /// Not of the form HOST:PORT.
    #[error("`{0}` is no holder: write HOST:PORT,HOST:PORT, one per host in the order of hosts")]
    Address(String),
    /// Two hosts cannot have the same one.
    #[error("the holder {0} is named twice: every host has its own")]
    Twice(String),
    /// This host is not among them.
    #[error("host {own} has no holder: {num_holders} are named, for hosts 0 to {}", num_holders - 1)]
    Own {
        /// Which host this is.
        own: usize,
        /// How many holders there are.
        num_holders: usize,
    },
}

/// The host that keeps copies for `host`: the next one. None where there is no other.
pub fn partner(host: usize, num_hosts: usize) -> Option<usize> {
    (num_hosts > 1).then(|| (host + 1) % num_hosts)
}

impl Neighbourhood {
    /// The holders that a list with commas names, as host `own` sees them.
    pub fn parse(list: &str, own: usize) -> Result<Neighbourhood, NeighbourhoodError> {
        let mut holders: Vec<String> = Vec::new();
        for holder in list.split(',').map(str::trim) {
            let port = holder.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            if port
                .and_then(|(_, port)| port.parse::<u16>().ok())
                .is_none()
            {
                return Err(NeighbourhoodError::Address(holder.to_owned()));
            }
            if holders.iter().any(|other| other == holder) {
                return Err(NeighbourhoodError::Twice(holder.to_owned()));
            }
            holders.push(holder.to_owned());
        }
        let num_holders = holders.len();
        match own < num_holders {
            true => Ok(Neighbourhood { holders, own }),
            false => Err(NeighbourhoodError::Own { own, num_holders }),
        }
    }

    /// The same of a list that is one already.
    pub fn of(holders: &[String], own: usize) -> Result<Neighbourhood, NeighbourhoodError> {
        Neighbourhood::parse(&holders.join(","), own)
    }

    /// All holders, in the order of hosts.
    pub fn holders(&self) -> &[String] {
        &self.holders
    }

    /// Which of them is this host's.
    pub fn own(&self) -> usize {
        self.own
    }

    /// This host's.
    pub fn own_holder(&self) -> &str {
        &self.holders[self.own]
    }

    /// Where this host's files are written: to its own holder, and to its partner's.
    pub(crate) fn keepers(&self) -> Vec<usize> {
        let partner = partner(self.own, self.holders.len());
        [self.own].into_iter().chain(partner).collect()
    }

    /// Everybody, in the order in which to ask: who keeps this host's files first.
    pub(crate) fn by_nearness(&self) -> Vec<usize> {
        let keepers = self.keepers();
        let others = (0..self.holders.len()).filter(|host| !keepers.contains(host));
        keepers.iter().copied().chain(others).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_are_read_strictly() {
        let two = Neighbourhood::parse("a:1, [::1]:2", 1).unwrap();
        assert_eq!(two.holders(), ["a:1", "[::1]:2"]);
        assert_eq!((two.own(), two.own_holder()), (1, "[::1]:2"));
        for bad in ["", "a", "a:", ":1", "a:1,", "a:65536", "a:1,a:1"] {
            assert!(Neighbourhood::parse(bad, 0).is_err(), "{bad}");
        }
        assert!(Neighbourhood::parse("a:1", 1).is_err());
    }

    proptest! {
        /// Every host keeps for one other, and is kept by one other.
        #[test]
        fn partners_make_a_ring(num_hosts in 2usize..200) {
            let mut kept: Vec<_> = (0..num_hosts).filter_map(|host| partner(host, num_hosts)).collect();
            prop_assert!(kept.iter().enumerate().all(|(host, partner)| host != *partner));
            kept.sort_unstable();
            prop_assert_eq!(kept, (0..num_hosts).collect::<Vec<_>>());
        }

        #[test]
        fn everybody_is_asked_once(num_hosts in 1usize..50, own in 0usize..50) {
            let list: Vec<String> = (0..num_hosts).map(|host| format!("h{host}:1")).collect();
            let own = own % num_hosts;
            let neighbourhood = Neighbourhood::parse(&list.join(","), own).unwrap();
            let mut order = neighbourhood.by_nearness();
            prop_assert_eq!(order[0], own);
            order.sort_unstable();
            prop_assert_eq!(order, (0..num_hosts).collect::<Vec<_>>());
        }
    }

    #[test]
    fn one_host_has_no_partner() {
        assert_eq!(partner(0, 1), None);
        let alone = Neighbourhood::parse("a:1", 0).unwrap();
        assert_eq!((alone.keepers(), alone.by_nearness()), (vec![0], vec![0]));
    }
}
