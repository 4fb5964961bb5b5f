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

    /// Gradients that were pushed from a time on until now, with the numbers of rows.
    pub(super) fn pushed(&mut self, num_bytes: u64, since_ns: u64) {
        let kind = (CollectiveKind::Send, Purpose::Gradient);
        self.add(kind, (num_bytes, num_bytes), since_ns);
    }

    /// Parameters that were pulled from a time on until now, with a request of `num_sent` bytes.
    pub(super) fn pulled(&mut self, num_bytes: u64, num_sent: u64, since_ns: u64) {
        let kind = (CollectiveKind::Recv, Purpose::Parameter);
        self.add(kind, (num_bytes, num_sent), since_ns);
    }

    fn add(
        &mut self,
        (kind, purpose): (CollectiveKind, Purpose),
        (payload_bytes, sent_bytes): (u64, u64),
        since_ns: u64,
    ) {
        self.ledger.collective(Collective {
            kind,
            group: "servers".to_owned(),
            group_size: self.num_servers + 1,
            sequence: self.num,
            purpose,
            dtype: "bytes".to_owned(),
            payload_bytes,
            sent_bytes,
            issued_ns: since_ns,
            started_ns: since_ns,
            ended_ns: self.now_ns(),
            waited: None,
        });
        self.num += 1;
    }
}
