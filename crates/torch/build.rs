//! Compiles the C++ side of the bridge against the libtorch that `./setup` installed.

use std::path::{Path, PathBuf};

const SOURCES: [&str; 7] = [
    "autograd.cc",
    "group.cc",
    "kernel.cc",
    "malloc.cc",
    "meta.cc",
    "observe.cc",
    "storage.cc",
];

fn main() {
    println!("cargo:rerun-if-changed=cpp");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let Some(libtorch) = std::env::var_os("LIBTORCH").map(PathBuf::from) else {
        eprintln!("LIBTORCH is not set: run ./setup first, which writes .cargo/config.toml");
        std::process::exit(1);
    };
    let cuda = std::env::var_os("CARGO_FEATURE_CUDA").is_some();

    let mut build = cxx_build::bridge("src/bridge.rs");
    build
        .std("c++20")
        .include("cpp")
        .include(libtorch.join("include"))
        .include(libtorch.join("include/torch/csrc/api/include"))
        .files(SOURCES.map(|name| Path::new("cpp").join(name)))
        .define("USE_C10D_GLOO", None)
        .define("USE_DISTRIBUTED", None)
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // As libtorch itself was built: without it, its headers check state that a release build does not set.
        .define("NDEBUG", None)
        // libtorch's headers cause many warnings.
        .flag("-Wno-unused-parameter")
        .flag("-Wno-sign-compare")
        .flag("-Wno-extra")
        // Debug information of libtorch's headers would be larger than the code.
        .debug(false)
        .opt_level(2);
    if cuda {
        cuda_sources(&mut build, &libtorch);
    } else {
        build.file("cpp/no_nccl.cc");
    }
    build.compile("trainyard_torch");

    let lib = libtorch.join("lib");
    println!("cargo:rustc-link-search=native={}", lib.display());
    // Not `torch`: it only pulls in the CUDA libraries, which take a third of a program's startup time.
    for name in ["torch_cpu", "c10"] {
        println!("cargo:rustc-link-lib={name}");
    }
}

/// NCCL sources; the headers come from the packages next to torch. Using `ProcessGroupNCCL` keeps the linker from
/// dropping the CUDA libraries, which register their kernels when they are loaded.
fn cuda_sources(build: &mut cc::Build, libtorch: &Path) {
    let site = libtorch.parent().unwrap_or(libtorch);
    build
        .file("cpp/nccl.cc")
        .define("USE_C10D_NCCL", None)
        .flag("-Wno-interference-size");
    for dir in [
        "nvidia/cu13/include",
        "nvidia/nccl/include",
        "nvidia/cu13/include/cccl",
    ] {
        build.include(site.join(dir));
    }
    for name in ["torch_cuda", "c10_cuda"] {
        println!("cargo:rustc-link-lib={name}");
    }
}
