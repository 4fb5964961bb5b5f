//! The shipped configs load, and agree with their comments.

use std::path::PathBuf;

use trainyard_config::Config;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../configs")
}

/// Paths in configs are relative to the root of the repository.
fn load(name: &str) -> Config {
    std::env::set_current_dir(folder().join("..")).unwrap();
    Config::load(folder().join(name), &[]).unwrap()
}

fn all() -> Vec<String> {
    std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".toml"))
        .collect()
}

#[test]
fn every_config_loads_shrinks_and_fits_any_multiple_of_its_ranks() {
    assert!(all().len() >= 7);
    for name in all() {
        let config = load(&name);
        let again = Config::parse(&config.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(config, again, "{name}");
        let section = &config.parallelism;
        let shared = section.tensor_parallel_degree
            * section.context_parallel_degree
            * section.pipeline_parallel_degree;
        let data = [
            section.data_parallel_shard_degree,
            section.data_parallel_replicate_degree,
        ];
        let all = if data.iter().all(|degree| *degree > 0) {
            vec![data.iter().product::<i64>() as usize]
        } else {
            vec![1, 2, 3, 4, 1024]
        };
        for times in all {
            let ranks = times * shared as usize;
            assert_eq!(config.mesh(ranks).unwrap().world_size(), ranks, "{name}");
            config.batching(times).unwrap();
        }
        let small = config.shrink();
        small.check().unwrap();
        let parameters = small.model.resolve().unwrap().num_parameters().unwrap();
        assert!(parameters < 10_000_000, "{name}: {parameters}");
    }
}

#[test]
fn the_sizes_are_the_published_ones() {
    for (name, parameters) in [
        ("llama-tiny.toml", 1_049_728),
        ("llama-small.toml", 27_795_968),
        ("cnn.toml", 6_442_762),
        ("small_moe.toml", 137_667_072),
        ("llama3.2-1b.toml", 1_235_814_400),
        ("llama3-8b.toml", 8_030_261_248),
        ("llama3-70b.toml", 70_553_706_496),
        ("llama3-405b.toml", 405_853_388_800),
        ("mixtral-8x7b.toml", 46_702_792_704),
        ("deepseek-v3.toml", 671_026_404_352),
    ] {
        let model = load(name).model.resolve().unwrap();
        assert_eq!(model.num_parameters(), Some(parameters), "{name}");
    }
}

#[test]
fn the_first_example_has_a_global_batch_of_eight_on_two_ranks() {
    let batching = load("llama-tiny.toml").batching(2).unwrap();
    assert_eq!((batching.global, batching.num_microbatches), (8, 1));
}
