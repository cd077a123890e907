// Prints the most likely next words of a sentence and completes it, with the model.pt written by
// examples/language_model/train.py.

#include <torch/script.h>
#include <xsoftmax/xsoftmax.h>

#include <cstdio>
#include <fstream>

#include "arguments.h"

namespace {

constexpr const char* kUsage =
    "usage: complete MODEL.pt \"the beginning of a sentence\" [--words 20] [--top 5] "
    "[--temperature 0.8] [--seed 1]\n"
    "  --words        how many words to add\n"
    "  --top          how many of the most likely next words to print\n"
    "  --temperature  0 always takes the most likely word, 1 samples from the model's "
    "distribution\n";

struct Options {
  std::string model;
  std::string prompt;
  int64_t words;
  int64_t top;
  double temperature;
  uint64_t seed;
};

Options parse(Arguments& arguments) {
  Options options;
  options.words = arguments.number<int64_t>("words", 20, 0);
  options.top = arguments.number<int64_t>("top", 5, 1);
  options.temperature = arguments.number<double>("temperature", 0.8, 0.0);
  options.seed = arguments.number<uint64_t>("seed", 1, 0);
  arguments.check_all_known();
  if (arguments.positional.size() != 2) {
    const std::string got = std::to_string(arguments.positional.size());
    throw UsageError("expected a model and a sentence in quotes, got " + got + " arguments");
  }
  options.model = arguments.positional[0];
  options.prompt = arguments.positional[1];
  return options;
}

torch::jit::Module load(const std::string& path) {
  if (!std::ifstream(path)) {
    throw UsageError("cannot read " + path);
  }
  torch::jit::Module model;
  try {
    model = torch::jit::load(path);
  } catch (const c10::Error& error) {
    std::string cause = error.what_without_backtrace();
    throw UsageError(path + " is not a scripted model: " + cause.substr(0, cause.find(". ")));
  }
  for (const char* method : {"encode", "next_words", "complete", "decode"}) {
    if (!model.find_method(method)) {
      throw UsageError(path + " has no method " + method +
                       ": expected model.pt of examples/language_model");
    }
  }
  return model;
}

void run(const Options& options) {
  torch::NoGradGuard no_grad;
  torch::manual_seed(options.seed);
  torch::jit::Module model = load(options.model);

  torch::Tensor ids = model.get_method("encode")({options.prompt}).toTensor();
  auto next = model.get_method("next_words")({ids, options.top}).toTuple();
  torch::Tensor probability = next->elements()[0].toTensor().exp();
  torch::Tensor likely = next->elements()[1].toTensor();
  for (int64_t i = 0; i < likely.numel(); ++i) {
    std::string word = model.get_method("decode")({likely.slice(0, i, i + 1)}).toStringRef();
    std::printf("%6.2f %%  %s\n", 100 * probability[i].item<double>(),
                word.empty() ? "(end of line)" : word.c_str());
  }

  torch::Tensor added =
      model.get_method("complete")({ids, options.words, options.temperature}).toTensor();
  std::string text = model.get_method("decode")({torch::cat({ids, added})}).toStringRef();
  std::printf("\n%s\n", text.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  // Links the registration of the library's operators, which a scripted model may contain.
  xsoftmax::init();
  return run_program("complete", kUsage, argc, argv,
                     [](Arguments& arguments) { run(parse(arguments)); });
}
