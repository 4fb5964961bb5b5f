//! What a worker exchanges with servers, in its ledger.

use trainyard_param_server::Rows;
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

    /// The bytes of the numbers of rows, which every server receives.
    pub(super) fn num_bytes_of(&self, rows: &Rows) -> usize {
        rows.to_bytes().len() * self.num_servers
    }

    /// Gradients that were pushed from a time on until now.
    pub(super) fn pushed(&mut self, num_bytes: usize, since_ns: u64) {
        let kind = (CollectiveKind::Send, Purpose::Gradient);
        self.add(kind, (num_bytes, num_bytes), since_ns);
    }

    /// Parameters that were pulled from a time on until now, with a request of `num_sent` bytes.
    pub(super) fn pulled(&mut self, num_bytes: usize, num_sent: usize, since_ns: u64) {
        let kind = (CollectiveKind::Recv, Purpose::Parameter);
        self.add(kind, (num_bytes, num_sent), since_ns);
    }

    fn add(
        &mut self,
        (kind, purpose): (CollectiveKind, Purpose),
        (payload, sent): (usize, usize),
        since_ns: u64,
    ) {
        self.ledger.collective(Collective {
            kind,
            group: "servers".to_owned(),
            group_size: self.num_servers + 1,
            sequence: self.num,
            purpose,
            dtype: "bytes".to_owned(),
            payload_bytes: payload as u64,
            sent_bytes: sent as u64,
            issued_ns: since_ns,
            started_ns: since_ns,
            ended_ns: self.now_ns(),
            waited: None,
        });
        self.num += 1;
    }
}
