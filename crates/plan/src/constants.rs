//! The few numbers that a data sheet does not have and a fit finds.
//!
//! Each has a plain meaning and a value that is likely before anything is measured, with how far off it may
//! be. A fit starts there, so few measurements move only what they speak about.

/// How far real kernels, links and programs stay behind data sheets.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Constants {
    /// The share of the peak that a very large matrix product reaches.
    pub matmul: f64,
    /// Elements of a product's result at which half of that is reached: fewer leave processors idle.
    pub matmul_area: f64,
    /// Depth of a product at which half of that is reached.
    pub matmul_depth: f64,
    /// The share of the peak that attention's products reach where scores are written down.
    pub attention: f64,
    /// The share of the peak that flash attention reaches.
    pub flash: f64,
    /// The share of the memory's bandwidth that reading and writing reach.
    pub memory: f64,
    /// Passes over attention's scores, over those that are needed.
    pub softmax: f64,
    /// Seconds in which the program can launch a block's forward.
    pub host_block: f64,
    /// Seconds more for every doubling of the ranks that share the block.
    pub host_rank: f64,
    /// Seconds the program spends on a micro-batch besides.
    pub host_microbatch: f64,
    /// The share of links inside a machine that collectives reach.
    pub link: f64,
    /// Seconds before a collective's bytes flow, per doubling of its ranks.
    pub link_latency: f64,
    /// The share of the links that one message between two ranks reaches.
    pub peer: f64,
    /// The share of network cards that collectives reach.
    pub network: f64,
    /// Seconds that leaving the machine adds.
    pub network_latency: f64,
    /// Bytes moved per logit by a loss that ranks share.
    pub loss: f64,
    /// Bytes moved per logit by a loss on one rank.
    pub loss_alone: f64,
    /// How often the optimiser passes over its states.
    pub optimizer: f64,
    /// Seconds of the optimiser's step beside that.
    pub optimizer_host: f64,
    /// Seconds it takes to begin reducing gradients.
    pub data_latency: f64,
}

/// How many there are.
pub const NUM_CONSTANTS: usize = 20;

/// What is likely before anything is measured: name, value, and how far off it may be (in powers of e).
const LIKELY: [(&str, f64, f64); NUM_CONSTANTS] = [
    ("matmul", 0.85, 0.1),
    ("matmul_area", 0.5e6, 0.7),
    ("matmul_depth", 128.0, 1.0),
    ("attention", 0.5, 0.5),
    ("flash", 0.5, 0.3),
    ("memory", 0.75, 0.2),
    ("softmax", 1.3, 0.3),
    ("host_block", 0.9e-3, 0.5),
    ("host_rank", 0.1e-3, 1.0),
    ("host_microbatch", 0.5e-3, 1.0),
    ("link", 0.7, 0.2),
    ("link_latency", 20e-6, 1.0),
    ("peer", 0.3, 0.7),
    ("network", 0.8, 0.3),
    ("network_latency", 30e-6, 1.0),
    ("loss", 30.0, 0.5),
    ("loss_alone", 60.0, 0.7),
    ("optimizer", 1.2, 0.3),
    ("optimizer_host", 2e-3, 1.0),
    ("data_latency", 0.3e-3, 1.0),
];

impl Constants {
    /// What is likely before anything is measured.
    pub fn likely() -> Constants {
        Constants::from_array(LIKELY.map(|(_, value, _)| value))
    }

    /// Their names, in order.
    pub fn names() -> [&'static str; NUM_CONSTANTS] {
        LIKELY.map(|(name, _, _)| name)
    }

    /// How far off each may be before anything is measured, in powers of e.
    pub fn doubts() -> [f64; NUM_CONSTANTS] {
        LIKELY.map(|(_, _, doubt)| doubt)
    }

    /// The most that each can be: no share is above all.
    pub fn most() -> [f64; NUM_CONSTANTS] {
        let is_share = |name| {
            let shares = [
                "matmul",
                "attention",
                "flash",
                "memory",
                "link",
                "peer",
                "network",
            ];
            shares.contains(&name)
        };
        LIKELY.map(|(name, _, _)| if is_share(name) { 1.0 } else { f64::INFINITY })
    }

    /// In order.
    pub const fn to_array(self) -> [f64; NUM_CONSTANTS] {
        [
            self.matmul,
            self.matmul_area,
            self.matmul_depth,
            self.attention,
            self.flash,
            self.memory,
            self.softmax,
            self.host_block,
            self.host_rank,
            self.host_microbatch,
            self.link,
            self.link_latency,
            self.peer,
            self.network,
            self.network_latency,
            self.loss,
            self.loss_alone,
            self.optimizer,
            self.optimizer_host,
            self.data_latency,
        ]
    }

    /// From values in order.
    pub const fn from_array(values: [f64; NUM_CONSTANTS]) -> Constants {
        let [
            matmul,
            matmul_area,
            matmul_depth,
            attention,
            flash,
            memory,
            softmax,
            host_block,
            host_rank,
            host_microbatch,
            link,
            link_latency,
            peer,
            network,
            network_latency,
            loss,
            loss_alone,
            optimizer,
            optimizer_host,
            data_latency,
        ] = values;
        Constants {
            matmul,
            matmul_area,
            matmul_depth,
            attention,
            flash,
            memory,
            softmax,
            host_block,
            host_rank,
            host_microbatch,
            link,
            link_latency,
            peer,
            network,
            network_latency,
            loss,
            loss_alone,
            optimizer,
            optimizer_host,
            data_latency,
        }
    }
}
