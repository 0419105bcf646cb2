# Runs single lines of a transfer through OpenNebula's own class for them, as its hypervisor driver does: with what it
# gives to the script's standard input. A message is: STEP <number> <base64 of {"words": [...], "stdin": "..."}>.

# The program that defines the class starts its loop only if it is run itself.
ONE_LOCATION = ENV['ONE_LOCATION']
RUBY_LIB_LOCATION = "#{ONE_LOCATION}/lib/ruby"
require 'load_opennebula_paths'
require 'base64'
require 'json'
require File.join(ARGV.shift, 'one_tm.rb')

# A driver process with one action more.
class StepDriver < TransferManagerDriver

    def initialize
        super(nil, :concurrency => 15)
        register_action(:STEP, method('step'))
    end

    def step(id, request)
        asked = JSON.parse(Base64.decode64(request))
        result, info = do_transfer_action(id, asked['words'], asked['stdin'])
        send_message('STEP', result, id, info)
    end

end

StepDriver.new.start_driver
