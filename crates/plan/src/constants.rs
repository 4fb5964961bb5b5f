//! Efficiency constants that data sheets do not state and a fit estimates.
//!
//! Each has a physical meaning and a prior: a value with an uncertainty. A fit starts from the prior, so a few
//! measurements move only the constants they say something about.

/// How far real kernels, links and programs fall short of data sheets.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Constants {
    /// The fraction of peak that a very large matrix product reaches.
    pub matmul: f64,
    /// Elements of a matrix product's result at which it reaches half of that; smaller results leave compute units
    /// idle.
    pub matmul_area: f64,
    /// Inner dimension at which a matrix product reaches half of that.
    pub matmul_depth: f64,
    /// The fraction of peak that attention's products reach if scores are materialized.
    pub attention: f64,
    /// The fraction of peak that flash attention reaches.
    pub flash: f64,
    /// The fraction of memory bandwidth that element-wise kernels reach.
    pub memory: f64,
    /// Actual over minimal memory passes over attention scores.
    pub softmax: f64,
    /// Host seconds to launch a block's forward pass.
    pub host_block: f64,
    /// Additional host seconds per doubling of the tensor-parallel degree.
    pub host_rank: f64,
    /// Host seconds per micro-batch beyond the blocks.
    pub host_microbatch: f64,
    /// The fraction of intra-node link bandwidth that collectives reach.
    pub link: f64,
    /// Latency of a collective in seconds, per doubling of its ranks.
    pub link_latency: f64,
    /// The fraction of link bandwidth that one point-to-point send reaches.
    pub peer: f64,
    /// The fraction of NIC bandwidth that collectives reach.
    pub network: f64,
    /// Additional latency of inter-node communication in seconds.
    pub network_latency: f64,
    /// Bytes moved per logit by a tensor-parallel (vocab-parallel) loss.
    pub loss: f64,
    /// Bytes moved per logit by a loss on a single rank.
    pub loss_alone: f64,
    /// How often the optimizer step passes over its states.
    pub optimizer: f64,
    /// Host seconds of the optimizer step.
    pub optimizer_host: f64,
    /// Seconds before gradient reduction starts.
    pub data_latency: f64,
}

/// The number of constants.
pub const NUM_CONSTANTS: usize = 20;

/// The prior: name, value, and standard deviation of the logarithm.
const PRIORS: [(&str, f64, f64); NUM_CONSTANTS] = [
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
    /// The prior values, before any measurement.
    pub fn prior() -> Constants {
        Constants::from_array(PRIORS.map(|(_, value, _)| value))
    }

    /// The names of the constants, in order.
    pub fn names() -> [&'static str; NUM_CONSTANTS] {
        PRIORS.map(|(name, _, _)| name)
    }

    /// The prior standard deviation of each constant's logarithm.
    pub fn prior_stds() -> [f64; NUM_CONSTANTS] {
        PRIORS.map(|(_, _, std)| std)
    }

    /// The upper bound of each constant: a fraction cannot exceed 1.
    pub fn upper_bounds() -> [f64; NUM_CONSTANTS] {
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
        PRIORS.map(|(name, _, _)| if is_share(name) { 1.0 } else { f64::INFINITY })
    }

    /// The values, in the order of [`Constants::names`].
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

    /// Constants from values in the order of [`Constants::names`].
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
