// Trains a next-word model on an artificial language with the library's C++ modules: sampled
// softmax, row-sparse gradients, no Python.
//
// A word has a topic and a rank. The topic of the next word is determined by that of the current
// word, and its rank is drawn from Zipf's distribution. So there is something to learn, and the
// lowest possible loss is known: the entropy of the ranks.

#include <torch/torch.h>
#include <xsoftmax/xsoftmax.h>

#include <chrono>
#include <cstdio>

#include "arguments.h"

namespace {

constexpr const char* kUsage =
    "usage: train [--classes 20000] [--topics 100] [--width 64] [--batch 512] [--steps 2000] "
    "[--samples 256] [--head 256]\n"
    "             [--lr 0.005] [--seed 1] [--threads 0]\n"
    "  --classes  number of words of the language, a multiple of --topics\n"
    "  --samples  classes sampled per step, in addition to the --head most frequent ones, which "
    "are always scored\n"
    "  --threads  0: as many as torch chooses\n";

struct Options {
  int64_t classes, topics, width, batch, steps, samples, head;
  double lr;
  uint64_t seed;
  int threads;
};

Options parse(Arguments& arguments) {
  Options options;
  options.classes = arguments.number<int64_t>("classes", 20000, 2);
  options.topics = arguments.number<int64_t>("topics", 100, 1);
  options.width = arguments.number<int64_t>("width", 64, 1);
  options.batch = arguments.number<int64_t>("batch", 512, 1);
  options.steps = arguments.number<int64_t>("steps", 2000, 1);
  options.samples = arguments.number<int64_t>("samples", 256, 1);
  options.head = arguments.number<int64_t>("head", 256, 0);
  options.lr = arguments.number<double>("lr", 0.005, 0.0);
  options.seed = arguments.number<uint64_t>("seed", 1, 0);
  options.threads = arguments.number<int>("threads", 0, 0);
  arguments.check_all_known();
  if (!arguments.positional.empty()) {
    throw UsageError("unexpected argument " + arguments.positional[0]);
  }
  if (options.classes % options.topics != 0) {
    throw UsageError("--classes: expected a multiple of --topics, got " +
                     std::to_string(options.classes) + " and " + std::to_string(options.topics));
  }
  if (options.head + options.samples > options.classes) {
    throw UsageError("--head and --samples together exceed the " + std::to_string(options.classes) +
                     " classes");
  }
  return options;
}

class Language {
 public:
  Language(int64_t classes, int64_t topics)
      : topics_(topics), next_topic_(torch::randperm(topics)) {
    rank_probability_ = 1 / torch::arange(1, classes / topics + 1, torch::kDouble);
    rank_probability_ /= rank_probability_.sum();
  }

  // Returns `count` words and the word that follows each. Ids increase with rank, so the first ids
  // are the most frequent words.
  std::pair<torch::Tensor, torch::Tensor> pairs(int64_t count) const {
    torch::Tensor topic = torch::randint(topics_, {count}, torch::kLong);
    return {word(topic), word(next_topic_.index_select(0, topic))};
  }

  // Returns the relative frequencies of all words.
  torch::Tensor frequencies() const { return rank_probability_.repeat_interleave(topics_); }

  double entropy() const {
    return -(rank_probability_ * rank_probability_.log()).sum().item<double>();
  }

 private:
  torch::Tensor word(const torch::Tensor& topic) const {
    return torch::multinomial(rank_probability_, topic.numel(), /*replacement=*/true) * topics_ +
        topic;
  }

  int64_t topics_;
  torch::Tensor next_topic_;
  torch::Tensor rank_probability_;
};

// Maps word ids [B] to hidden states [B, width].
struct EncoderImpl : torch::nn::Module {
  EncoderImpl(int64_t words, int64_t width)
      : embedding(register_module(
            "embedding",
            torch::nn::Embedding(torch::nn::EmbeddingOptions(words, width).sparse(true)))),
        linear(register_module("linear", torch::nn::Linear(width, width))) {
    torch::nn::init::normal_(embedding->weight, 0, 0.1);
  }

  torch::Tensor forward(const torch::Tensor& ids) { return linear(embedding(ids)).tanh(); }

  torch::nn::Embedding embedding;
  torch::nn::Linear linear;
};
TORCH_MODULE(Encoder);

void run(const Options& options) {
  if (options.threads > 0) {
    torch::set_num_threads(options.threads);
  }
  torch::manual_seed(options.seed);
  Language language(options.classes, options.topics);

  Encoder encoder(options.classes, options.width);
  xsoftmax::samplers::UnigramSampler sampler(language.frequencies(), options.samples);
  xsoftmax::nn::SampledSoftmaxLoss loss(
      options.width, options.classes, sampler,
      xsoftmax::nn::SamplingOptions{.head = torch::arange(options.head)},
      xsoftmax::nn::LossOptions{.bias = true});

  // Both tables have row-sparse gradients, and RowAdam touches only the rows of a step.
  std::vector<torch::Tensor> parameters = encoder->parameters();
  for (const torch::Tensor& parameter : loss->parameters()) {
    parameters.push_back(parameter);
  }
  xsoftmax::optim::RowAdam optimizer(parameters, xsoftmax::optim::RowAdamOptions(options.lr));

  auto [held_out, held_out_target] = language.pairs(4096);
  auto evaluate = [&, &held_out = held_out, &held_out_target = held_out_target] {
    torch::NoGradGuard no_grad;
    loss->eval(); // the exact loss over all classes
    optimizer.flush(); // applies pending updates of the embedding; the loss flushes only its own
    return loss->forward(encoder(held_out), held_out_target).item<double>();
  };

  std::printf("%ld classes; the exact loss of blind guessing is %.3f, the least possible %.3f\n\n",
              long(options.classes), std::log(double(options.classes)), language.entropy());
  std::printf("%8s %12s %16s %22s\n", "step", "seconds", "sampled loss", "exact loss, held out");
  std::printf("%8d %12.1f %16s %22.3f\n", 0, 0.0, "-", evaluate());
  double seconds = 0, sum = 0;
  const int64_t interval = std::max<int64_t>(options.steps / 10, 1);
  for (int64_t step = 1, since = 0; step <= options.steps; ++step) {
    auto [input, target] = language.pairs(options.batch);
    const auto start = std::chrono::steady_clock::now();
    loss->train();
    optimizer.zero_grad();
    torch::Tensor value = loss->forward(encoder(input), target);
    value.backward();
    xsoftmax::clip_grad_norm_(parameters, 1.0);
    optimizer.step();
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    sum += value.item<double>();
    ++since;
    if (step % interval == 0 || step == options.steps) {
      std::printf("%8ld %12.1f %16.3f %22.3f\n", long(step), seconds, sum / since, evaluate());
      std::fflush(stdout);
      sum = since = 0;
    }
  }

  torch::NoGradGuard no_grad;
  torch::Tensor best = loss->predict(encoder(held_out));
  double right = (best % options.topics == held_out_target % options.topics)
                     .to(torch::kDouble)
                     .mean()
                     .item<double>();
  std::printf(
      "\n%.1f ms per step; the likeliest word has the right topic for %.1f %% of the held-out "
      "words\n",
      1000 * seconds / options.steps, 100 * right);
}

} // namespace

int main(int argc, char** argv) {
  return run_program("train", kUsage, argc, argv,
                     [](Arguments& arguments) { run(parse(arguments)); });
}
