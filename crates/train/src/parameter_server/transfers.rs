//! What a worker exchanges with servers, in its ledger.

use trainyard_trace::{Collective, CollectiveKind, Ledger, Purpose};

/// The pushes and pulls of a worker.
pub(super) struct Transfers {
    ledger: Ledger,
    num_servers: usize,
    num: u64,
}

impl Transfers {
    pub(super) fn new(ledger: &Ledger, num_servers: usize) -> Transfers {
        Transfers {
            ledger: ledger.clone(),
            num_servers,
            num: 0,
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.ledger.now_ns()
    }

    /// Gradients that were pushed from a time on until now.
    pub(super) fn pushed(&mut self, num_bytes: usize, since_ns: u64) {
        self.add(CollectiveKind::Send, Purpose::Gradient, num_bytes, since_ns);
    }

    /// Parameters that were pulled from a time on until now.
    pub(super) fn pulled(&mut self, num_bytes: usize, since_ns: u64) {
        self.add(
            CollectiveKind::Recv,
            Purpose::Parameter,
            num_bytes,
            since_ns,
        );
    }

    fn add(&mut self, kind: CollectiveKind, purpose: Purpose, num_bytes: usize, since_ns: u64) {
        let bytes = num_bytes as u64;
        self.ledger.collective(Collective {
            kind,
            group: "servers".to_owned(),
            group_size: self.num_servers + 1,
            sequence: self.num,
            purpose,
            dtype: "bytes".to_owned(),
            payload_bytes: bytes,
            sent_bytes: if kind == CollectiveKind::Send {
                bytes
            } else {
                0
            },
            issued_ns: since_ns,
            started_ns: since_ns,
            ended_ns: self.now_ns(),
            waited: None,
        });
        self.num += 1;
    }
}
